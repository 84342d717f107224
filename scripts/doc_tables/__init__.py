"""The tables that scripts/tables.py writes into the documents, a module a subject."""
