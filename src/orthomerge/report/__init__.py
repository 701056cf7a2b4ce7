"""Records and a diagnosis as tables, figures and one page; no model is needed."""
