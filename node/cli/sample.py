"""`thinwire sample RUN_DIR PROMPT...`: generate text from a snapshot on this machine."""

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from node.cli.parser import UsageError, number
from node.cli.snapshot_model import add_arguments, load_model, open_snapshot
from wire.errors import escaped, shortened

if TYPE_CHECKING:
    from node.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sample", help="generate text from a snapshot")
    add_arguments(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="text to continue (repeatable)")
    parser.add_argument(
        "--chat", action="store_true", help="pass each PROMPT to the chat template as a user's message"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="generate at most N tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a JSON object per prompt instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise UsageError(f"--temperature must be 0 or more, got {args.temperature}")
    for name, value, least in (("tokens", args.tokens, 1), ("top-k", args.top_k, 0), ("seed", args.seed, 0)):
        if value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    if args.seed >= 1 << 63:
        raise UsageError(f"--seed must be below 2**63, got {args.seed}")
    for prompt in args.prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the prompt {shortened(repr(prompt))} is not UTF-8 text: write it as such"
            ) from None
    import numpy as np

    from node.data.chat import chat_encoder
    from node.data.tokenizer import BYTES, load_tokenizer

    config, _, _ = open_snapshot(args)
    tokenizer = load_tokenizer(config.data.tokenizer)
    ends = tokenizer.ends
    if args.chat:
        if config.data.tokenizer == BYTES:
            raise UsageError("--chat needs a tokenizer with a chat template; the run's tokens are bytes")
        chat = chat_encoder(config.data)
        prompts = [chat.question(prompt) for prompt in args.prompts]
        ends |= chat.turn_ends
    else:
        prompts = [tokenizer.prompt(prompt) for prompt in args.prompts]
    if outside := [token for prompt in prompts for token in prompt if token >= config.model.vocab]:
        raise UsageError(
            f"the prompt has the token {outside[0]} ({tokenizer.decode(np.array(outside[:1]))!r}), which is "
            "not in the model's vocabulary: leave it out"
        )
    if (longest := max(map(len, prompts))) > config.model.sequence:
        log.warning(
            "a prompt has %d tokens; the model reads only the last %d (model.sequence)",
            longest,
            config.model.sequence,
        )
    step, model = load_model(args)
    for prompt, ids in zip(args.prompts, prompts, strict=True):
        tokens = model.generate(
            ids,
            tokens=args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
            ends=ends,
        )
        # An answer is a text of its own.
        pieces = _pieces(tokens, tokenizer, [] if args.chat else ids)
        if args.json:
            text = "".join(pieces)
            sys.stdout.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
            sys.stdout.flush()
            continue
        sys.stdout.write("" if args.chat else prompt)
        for piece in pieces:
            sys.stdout.write(escaped(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


def _pieces(tokens: Iterable[int], tokenizer: "Tokenizer", before: Sequence[int]) -> Iterator[str]:
    """The text of token ids, piece by piece. A character of several tokens is yielded whole.

    Args:
        before: the ids that the text continues. Decoders in SentencePiece's style drop the space at the
            beginning of a text.
    """
    import numpy as np

    ids = list(before)
    shown = len(tokenizer.decode(np.array(ids)))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(np.array(ids))
        if not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(np.array(ids))[shown:]
