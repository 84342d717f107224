"""Everything that crosses a link: codecs, frames, streams, identities, errors. It knows no training loop."""
