"""Parts of scripts/exp_pipeline_floor.py."""
