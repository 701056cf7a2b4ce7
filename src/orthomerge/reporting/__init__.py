"""Records and a diagnosis as one HTML page, figures and tables; sees no model."""
