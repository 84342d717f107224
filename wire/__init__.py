"""All that crosses a link: codecs, frames, streams, identities, errors. Knows no training loop."""
