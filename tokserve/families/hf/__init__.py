"""Families without a spec function: their own module from transformers on our projections and pages."""
