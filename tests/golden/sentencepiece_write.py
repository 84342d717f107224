"""Write small SentencePiece models and the ids that they give: `python tests/golden/sentencepiece_write.py`.

Needs the sentencepiece package, which nothing else does.
"""

import base64
import json
import random
import tempfile
from pathlib import Path

import sentencepiece  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
LETTERS = "the ferry of line12 'x\u4e2d\u00e9\U0001f600\n\t  "


def main() -> None:
    text = [
        f"the {word} of line {n}, isn't it? {n * n} \u4e2d\u6587 caf\u00e9  two"
        for n in range(300)
        for word in ("end", "start", "ferry")
    ]
    random.seed(1)
    odd = ["".join(random.choice(LETTERS) for _ in range(random.randint(1, 40))) for _ in range(40)]
    found: dict[str, object] = {"sentencepiece": sentencepiece.__version__}
    for kind in ("bpe", "unigram"):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "text").write_text("\n".join(text), encoding="utf-8")
            sentencepiece.SentencePieceTrainer.train(
                input=f"{folder}/text",
                model_prefix=f"{folder}/tokenizer",
                model_type=kind,
                vocab_size=420,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                hard_vocab_limit=False,
                minloglevel=3,
                **({"user_defined_symbols": ["<turn>"]} if kind == "bpe" else {}),
            )
            model = (Path(folder) / "tokenizer.model").read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        cases = [[case, processor.encode(case)] for case in (*text[10:12], *odd)]
        found[kind] = {"model": base64.b64encode(model).decode(), "cases": cases}
    (HERE / "sentencepiece.json").write_text(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
