"""What a document tells its readers to save."""

import re


def saved_files(text: str) -> dict[str, str]:
    """The files that a page tells to save, by name: the block after `save ... as **NAME**`."""
    found = {}
    told = r"[Ss]ave (?:it|this) as\s[*]{2}([\w.-]+?)[*]{2}[^\n]*\n(?:\S[^\n]*\n)*\n((?:    .*\n|\n)+)"
    for name, block in re.findall(told, text):
        found[name] = re.sub(r"^    ", "", block, flags=re.MULTILINE).strip() + "\n"
    return found
