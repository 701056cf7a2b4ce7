"""Records, and what was found out about them, as tables, figures and one page. Nothing here ever sees a model."""
