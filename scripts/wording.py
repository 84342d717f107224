"""How scripts word what went wrong, in reports and in what they print."""

MOST = 300


def one_line(problem: BaseException, most: int = MOST) -> str:
    """The exception's class and message in one line, cut to `most` characters: `ValueError: no such shape`.

    Compilers and libraries send whole pages; what is wrong stands at the beginning.
    """
    kind, words = type(problem).__name__, " ".join(str(problem).split())
    return f"{kind}: {words}"[:most] if words else kind
