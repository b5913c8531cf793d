"""Runs: trained here, in a process of their own or in several, and attached to. Loads no torch."""
