"""The tables that tables.py writes into the documents, one module per subject."""
