"""`thinwire sample RUN_DIR PROMPT`: generate text from a snapshot, on this machine."""

import argparse
import math
import sys
from typing import Any

from node.cli.parser import UsageError
from node.cli.snapshot_model import add_arguments, load_model, open_snapshot
from wire.errors import escaped

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sample", help="generate text from a snapshot")
    add_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="give PROMPT to the chat template as a user's message"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="most tokens to generate (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws (default: 0)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise UsageError(f"--temperature must be 0 or more, got {args.temperature}")
    for name, value, least in (("tokens", args.tokens, 1), ("top-k", args.top_k, 0), ("seed", args.seed, 0)):
        if value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
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
        prompt = chat.question(args.prompt)
        ends |= chat.turn_ends
    else:
        prompt = tokenizer.prompt(args.prompt)
    if outside := [token for token in prompt if token >= config.model.vocab]:
        raise UsageError(
            f"the prompt has the token {outside[0]} ({tokenizer.decode(np.array(outside[:1]))!r}), for which "
            "the model has no row: leave it out"
        )
    _, model = load_model(args)
    made = model.generate(
        prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        ends=ends,
    )
    sys.stdout.write("" if args.chat else args.prompt)
    ids: list[int] = []
    shown = 0
    for token in made:
        ids.append(token)
        text = tokenizer.decode(np.array(ids))
        # A character may take several tokens: wait until it is whole.
        if not text.endswith(UNFINISHED):
            sys.stdout.write(escaped(text[shown:]))
            sys.stdout.flush()
            shown = len(text)
    sys.stdout.write(escaped(tokenizer.decode(np.array(ids))[shown:]) + "\n")
    return 0
