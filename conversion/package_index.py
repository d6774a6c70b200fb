"""Downloads a package's file from the package index that pip is configured to use. pip need not be installed.

Indexes and access to them are read from pip's configuration files and ``PIP_…`` variables. The `unearth` library does
the rest.
"""

import configparser
import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import platformdirs

from .errors import CheckpointError
from .progress import Meter


def download(requirement: str, folder: Path, progress: bool | None = None) -> Path:
    """Download the file that best matches a requirement, or return its path if an index on this machine has it.

    Args:
        requirement: in pip's syntax, ``name==version``.
        folder: directory for downloads.
        progress: see `kvjax.conversion.load`.

    Raises:
        CheckpointError: no index has the package, or none can be reached.
    """
    # Imported late: few programs download, and the import changes a class of the HTTP client that others use too.
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    settings = pip_settings()
    hosts = settings.get("trusted-host", "").split()
    try:
        with PyPIClient(
            trusted_hosts=hosts,
            verify=ssl.create_default_context(cafile=settings.get("cert")),
            proxy=settings.get("proxy"),
            timeout=float(settings.get("timeout", 15)),
        ) as client:
            index = [] if _true(settings, "no-index") else settings.get("index-url", "").split()
            # Without explicit sources, the finder uses the public index, as pip does.
            finder = PackageFinder(cast(Any, client), index_urls=index, trusted_hosts=hosts)
            if _true(settings, "no-index"):
                finder.sources.clear()
            else:
                for url in settings.get("extra-index-url", "").split():
                    finder.add_index_url(url)
            for place in settings.get("find-links", "").split():
                finder.add_find_links(place if "://" in place else Path(place).absolute().as_uri())
            client.auth = MultiDomainBasicAuth(
                index_urls=[source["url"] for source in finder.sources if source["type"] == "index"], prompting=False
            )
            found = finder.find_best_match(requirement).best
            if found is None:
                raise CheckpointError(f"no package index has {requirement}")
            with Meter(f"Downloading {found.link.filename}", None, progress) as meter:
                return finder.download(
                    found.link, folder, download_reporter=lambda link, completed, total: meter.reach(completed, total)
                )
    except CheckpointError:
        raise
    except Exception as error:  # the library and its HTTP client share no base class
        raise CheckpointError(f"{requirement} cannot be downloaded ({error})") from error


def pip_settings() -> Mapping[str, str]:
    """pip's settings by option name. Later places override earlier ones.

    The order is: files for all users, for this user and for this environment, the file in ``PIP_CONFIG_FILE``, and the
    variables.
    """
    files = configparser.RawConfigParser(strict=False)
    for file in _config_files():
        try:
            files.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: not a pip configuration file ({error})") from error
    found: dict[str, str] = {}
    for section in ("global", "download"):
        if files.has_section(section):
            found |= {name.replace("_", "-"): value for name, value in files.items(section)}
    prefix = "PIP_"
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}
    found |= {name.removeprefix(prefix).lower().replace("_", "-"): value for name, value in variables.items()}
    if "default-timeout" in found:
        found.setdefault("timeout", found["default-timeout"])
    return found


def _config_files() -> list[Path]:
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    name = "pip.ini" if os.name == "nt" else "pip.conf"
    everybody = platformdirs.site_config_dir("pip", appauthor=False, multipath=True).split(os.pathsep)
    return [
        *(Path(folder) / name for folder in reversed(everybody)),
        Path("/etc", name),
        Path.home() / ".pip" / name,
        platformdirs.user_config_path("pip", appauthor=False) / name,
        Path.home() / ".config" / "pip" / name,
        Path(sys.prefix) / name,
        *([Path(named)] if named else []),
    ]


def _true(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "").lower() in ("1", "true", "yes", "on")
