"""The slow-network laboratory: runs of real processes over shaped links, measured, compared and drawn."""
