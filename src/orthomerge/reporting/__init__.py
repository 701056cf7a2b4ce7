"""Render records and a diagnosis as one HTML page, figures and tables; no model is needed."""
