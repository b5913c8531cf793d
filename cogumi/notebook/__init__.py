"""What a person sees: the panel of a run, figures, the report, the form of a configuration. Loads no torch."""
