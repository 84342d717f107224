"""Table of what `config explain` foretells, beside measured steps."""

from scripts.docs.markdown import read_report, spaced
from scripts.report import RESULTS, markdown

EXPLAINED = RESULTS / "explained_steps.json"


def explained_steps() -> str:
    """What `config explain` foretells of six runs, and what the lab measured."""
    report = read_report(EXPLAINED)
    rows = []
    for run in report["settings"]:
        told, found, off = run["foretold"], run["measured"], run["off"]
        pairs = zip(told["memory"], found["memory"], strict=True)
        memory = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
        bounds = zip(told["most_memory"], found["most_memory"], strict=True)
        rows.append(
            [
                run["name"],
                run["codecs"],
                f"{told['seconds']:.2f}, {found['seconds']:.2f} ({off['seconds']:+.1%})",
                f"{found['least']:.2f} to {found['most']:.2f}",
                f"{told['bytes'] / 1e6:.3f}, {found['bytes'] / 1e6:.3f} ({off['bytes']:+.1%})",
                f"{memory[0] / 1e6:.0f}, {memory[1] / 1e6:.0f} ({off['memory']:+.1%})",
                f"{min(most / peak for most, peak in bounds):.2f}",
                f"{found['quiet_runs']} of {len(run['runs'])}",
            ]
        )
    headings = (
        "seconds a step",
        "of the steps",
        "MB that the busiest machine sends",
        "MB of memory at the stage furthest off",
        "least bound over peak",
        "quiet runs",
    )
    columns = [("run", "left"), ("codecs", "left"), *((words, "right") for words in headings)]
    machine = report["settings"][0]["machine"]
    versions = machine["versions"]
    measured = ", ".join(
        dict.fromkeys(one["commit"][:12] for run in report["settings"] for one in run["runs"])
    )
    caption = (
        "Foretold, measured (difference). Each machine has one line for all its links; medians of runs of "
        f"{report['steps']} steps, whose stages share {machine['cores']} cores; seconds only of runs beside "
        f"which nothing else used these. {spaced(machine['processor'])}, torch {versions['torch']}, "
        f"Python {versions['python']}, measured at commit {measured}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"
