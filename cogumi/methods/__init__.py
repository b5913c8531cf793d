"""SFT, DPO and GSPO: arguments, automatic settings, examples."""
