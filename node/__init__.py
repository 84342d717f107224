"""The program: command line, configuration, coordinator, stage, model, training, telemetry."""
