"""Hatch's matrix of `alone` environments: one for each folder of packages, from no list."""

from pathlib import Path
from typing import Any

from hatch.env.collectors.plugin.interface import EnvironmentCollectorInterface


class Systems(EnvironmentCollectorInterface):
    """Adds `system = [every folder of packages]` to the environment `alone`."""

    def get_initial_config(self) -> dict[str, dict[str, Any]]:
        """The matrix, under the name of its environment; pyproject.toml adds the rest."""
        projects = sorted(Path(self.root).glob("packages/[!.]*/pyproject.toml"))
        return {"alone": {"matrix": [{"system": [p.parent.name for p in projects]}]}}
