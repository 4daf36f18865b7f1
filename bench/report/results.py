"""Result files as ``bench/environment.py`` writes them, read back."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"torch": "torch", "triton": "triton", "nvidia-dali-cuda130": "DALI"}
KEYS = {"subject": str, "machine": dict, "findings": list}  # that a result has to have


@dataclass(frozen=True)
class Result:
    path: Path
    data: dict

    @property
    def subject(self) -> str:
        return self.data["subject"]

    @property
    def machine(self) -> dict:
        return self.data["machine"]

    @property
    def date(self) -> str:
        """As its folder says; "" if that says nothing."""
        found = re.search(r"\d{4}-\d\d-\d\d$", self.path.parent.name)
        return found[0] if found else ""

    @property
    def commit(self) -> str:
        """Of the code that was measured, short; "+": with changes that are in no commit."""
        return short(self.machine.get("commit") or "unknown")

    @property
    def scale(self) -> str:
        """ "smoke": says that it runs and nothing about speed; "small": on a CPU, in minutes; "full"."""
        return self.data.get("scale", "full")

    @property
    def command(self) -> str:
        """That makes such a file, without its output. Of a file ``by_hand``: that measures the same now, if any."""
        words = ["by hand"] if self.data.get("by_hand") else []
        words += [f"`{self.data['command']}`"] if "command" in self.data else []
        return "; now ".join(words) or "unknown"


def read(folder: Path) -> list[Result]:
    """All results below ``folder``, newest folder first, small sizes last of a day; ValueError for a file that is
    none."""
    found = []
    for path in sorted(folder.glob("**/*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError as error:  # also where it is no text
            raise ValueError(f"{path} is no JSON ({error}); expected a result of python -m bench") from None
        for key, kind in KEYS.items():
            if not (isinstance(data, dict) and isinstance(data.get(key), kind)):
                raise ValueError(f'{path} has no "{key}"; expected a result of python -m bench')
        found.append(Result(path, data))
    return sorted(found, key=lambda r: (r.date, r.scale != "small", r.path.parent.name), reverse=True)


def hardware(results: list[Result]) -> str:
    """Of results from one folder: device, cores, driver and versions; several where they differ."""

    def values(get):
        return " or ".join(dict.fromkeys(str(x) for result in results if (x := get(result.machine)) is not None))

    parts = [values(lambda m: m.get("device")), f"{values(lambda m: m.get('cores'))} cores"]
    parts += [f"driver {driver}"] if (driver := values(lambda m: m.get("driver"))) else []
    for package, name in PACKAGES.items():
        version = values(lambda m, package=package: m.get("versions", {}).get(package))
        parts += [f"{name} {version}"] if version else []
    return ", ".join([*parts, f"Python {values(lambda m: m.get('python'))}"])


def by_folder(results: list[Result]) -> dict[Path, list[Result]]:
    """In their order, but those of GPUs first."""
    folders = {}
    for result in sorted(results, key=lambda result: not result.machine.get("driver")):
        folders.setdefault(result.path.parent, []).append(result)
    return folders


def short(commits: str) -> str:
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", commits)
