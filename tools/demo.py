"""Every system does its headline job on real input; one table and one page say what came out.

python tools/demo.py        # the page: out/demo/index.html
"""

import argparse
import base64
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from environment import ROOT
from reproduce import System, run_verb, systems
from septet_shared._whole_files import write_whole
from septet_shared.experiment import machine, versions
from septet_shared.experiment.commands import print_table
from septet_shared.experiment.results import show

TEMPLATE = Path(__file__).with_name("demo.html")


@dataclass(frozen=True)
class Shown:
    """What the demo of one system gave: its record and plots, or the error that ended it."""

    system: System
    seconds: float
    error: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)  # HTML of each

    @property
    def failing(self) -> list[str]:
        """The claims that do not hold."""
        return [claim["text"] for claim in self.record.get("claims", []) if not claim["holds"]]

    def line(self) -> list[str]:
        """System, what ran, the paper's figure, ours, kind of ours, seconds."""
        if self.error:
            return [
                self.system.module,
                f"failed: {self.error}",
                "",
                "",
                "",
                show(round(self.seconds, 1)),
            ]
        top = self.record["headline"]
        ours = top["ours"] + "".join(f"; does not hold: {text}" for text in self.failing)
        return [
            self.system.module,
            top["ran"],
            top["paper"],
            ours,
            top["kind"],
            show(round(self.seconds, 1)),
        ]


HEADER = ["system", "what ran", "the paper's figure", "ours", "kind", "seconds"]


def run_demo(system: System, timeout_s: float) -> Shown:
    """The demo of one system, run in a process of its own."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        code, error = run_verb(
            system, "demo", "--json", "--out", folder, timeout_s=timeout_s, keep_output=False
        )
        seconds = time.perf_counter() - start
        record = Path(folder) / "demo.json"
        if code not in (0, 1) or not record.exists():  # 1: it ran, and a claim does not hold
            return Shown(system, seconds, error or f"exit code {code}")
        pictures = [p for p in sorted(Path(folder).iterdir()) if p.suffix in (".svg", ".png")]
        plots = [_figure(path) for path in pictures]
        return Shown(system, seconds, None, json.loads(record.read_text()), plots)


def _figure(path: Path) -> str:
    if path.suffix == ".svg":
        return path.read_text()
    data = base64.b64encode(path.read_bytes()).decode()
    source = f"data:image/png;base64,{data}"
    return f'<img class="paper-white" alt="{escape(path.stem)}" src="{source}">'


def page(shown: list[Shown], command: str = "make demo") -> str:
    """One HTML page with everything in it: table, plots, claims, machine and versions."""
    seconds = sum(one.seconds for one in shown)
    ran = sum(not one.error for one in shown)
    facts = {**machine(), **versions()}
    facts["gpus"] = ", ".join(facts["gpus"]) or "none"
    facts["memory"] = f"{facts.pop('memory_gb')} GB"
    for one in shown:
        known = one.record.get("versions", {})
        facts |= {name: version for name, version in known.items() if name == one.system.module}
    return Template(TEMPLATE.read_text()).substitute(
        count=(f"{ran} of " if ran < len(shown) else "")
        + f"{len(shown)} system{'' if len(shown) == 1 else 's'}",
        seconds=f"{seconds:.0f}",
        rows="\n".join(_row(one) for one in shown),
        sections="\n".join(_section(one) for one in shown if not one.error),
        facts="\n".join(
            f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>"
            for name, value in facts.items()
        ),
        command=escape(command),
        date=time.strftime("%d %B %Y, %H:%M"),
    )


def _row(one: Shown) -> str:
    name, *texts, seconds = (escape(cell) for cell in one.line())
    if one.error:
        cells = f'<td class="wrong" data-label="{HEADER[1]}" colspan="4">{texts[0]}</td>'
    else:
        name = f'<a href="#{name}">{name}</a>'
        texts[2] = f"<strong>{escape(one.record['headline']['ours'])}</strong>" + "".join(
            f'<br><span class="wrong">does not hold: {escape(text)}</span>' for text in one.failing
        )
        texts[3] = f'<span class="kind {texts[3]}">{texts[3]}</span>'
        cells = "".join(
            f'<td data-label="{label}"><div>{text}</div></td>'
            for label, text in zip(HEADER[1:], texts, strict=False)
        )
    last = f'<td data-label="{HEADER[-1]}" class="number">{seconds}</td>'
    return f'<tr><th scope="row">{name}</th>{cells}{last}</tr>'


def _section(one: Shown) -> str:
    name = escape(one.system.module)
    record = one.record
    claims = "".join(
        f'<li class="{"holds" if claim["holds"] else "fails"}">{escape(claim["text"])}'
        + (f' <span class="quiet">({escape(claim["detail"])})</span>' if claim["detail"] else "")
        + "</li>"
        for claim in record["claims"]
    )
    table = record["table"]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table["header"])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in table["cells"]
    )
    # a line of its own for each "Paper:", "Measured here:", "Not reproduced:"; the rest flows
    parts = re.split(r"\n\s*\n|\n(?=[A-Z][a-z ]+:)", record["about"])
    about = "".join(f"<p>{escape(part)}</p>" for part in parts)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table["notes"])
    plots = "".join(f"<figure>{plot}</figure>" for plot in one.plots) or (
        '<p class="quiet">No plot: pip install matplotlib.</p>'
    )
    return f"""<section id="{name}">
<h2>{name}</h2>
<p class="title">{escape(record["title"])}</p>
{plots}
<ul class="claims">{claims}</ul>
<details><summary>All rows</summary>
<div class="wide"><table class="rows">
<thead><tr>{head}</tr></thead><tbody>{body}</tbody>
</table></div>
<ul class="notes">{notes}</ul></details>
<details><summary>What the paper claims, what is measured, what is not reproduced</summary>
{about}
<p class="quiet"><code>{escape(record["command"])}</code></p></details>
</section>"""


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The exit code: 0, or 1 when a demo failed or a claim of one does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--timeout-s", type=float, default=600, help="for each system")
    asked = parser.parse_args(arguments)
    shown = []
    for system in systems(root):
        print(f"{system.module} ...", file=sys.stderr)
        shown.append(run_demo(system, asked.timeout_s))
    if not shown:
        print(f"no system under {root / 'packages'}", file=sys.stderr)
        return 2
    path = write_whole(asked.out / "index.html", page(shown))
    print_table("", HEADER, [one.line() for one in shown])
    print(f"the plots: {path}")
    return 1 if any(one.error or one.failing for one in shown) else 0


if __name__ == "__main__":
    sys.exit(main())
