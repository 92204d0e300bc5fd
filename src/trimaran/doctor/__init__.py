"""Diagnoses a machine before a run (`checks`), and a run while it trains or afterwards (`rules`)."""
