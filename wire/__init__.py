"""Everything that crosses a link: codecs, frames, streams, identities, errors. No training loop."""
