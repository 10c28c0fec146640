"""Lists what is in an artefact, as CycloneDX JSON: the image, the Debian package, and what the wheel was tested with.

The same contents give the same text. Scanners for known vulnerabilities read these lists: docs/releasing.md says how.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import file_digest
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement

import scrubber

__all__ = ["bill_of_materials", "component", "installed_packages", "locked_packages", "write_bill_of_materials"]


def bill_of_materials(name: str, kind: ComponentType, digest: str, parts: Iterable[Component], moment: float) -> str:
    """Return the list for one artefact.

    Args:
        digest: the artefact's, ``sha256:…``.
        moment: the time in the list, in seconds since the epoch.
    """
    root = Component(
        type=kind,
        name=name,
        version=scrubber.__version__,
        bom_ref="root",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
    )
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, digest))
    bom.metadata.timestamp = datetime.fromtimestamp(moment, UTC)
    bom.metadata.component = root
    bom.components.update(parts)
    bom.register_dependency(root, bom.components)
    text: str = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text + "\n"


def write_bill_of_materials(artefact: Path, parts: Iterable[Component]) -> Path:
    """Write the list of a file beside it, as ``NAME.cdx.json``, and return its path.

    With SOURCE_DATE_EPOCH (Unix time, in seconds) in the environment, that is the time in it.
    """
    with artefact.open("rb") as file:
        digest = f"sha256:{file_digest(file, 'sha256').hexdigest()}"
    moment = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    target = artefact.with_name(f"{artefact.name}.cdx.json")
    target.write_text(bill_of_materials(artefact.name, ComponentType.FILE, digest, parts, moment), encoding="utf-8")
    return target


def component(purl: PackageURL, *hashes: HashType) -> Component:
    """Return one entry of a list."""
    return Component(name=purl.name, version=purl.version, purl=purl, bom_ref=purl.to_string(), hashes=hashes)


def installed_packages(site: Path) -> Iterator[Component]:
    """Yield the Python packages that are installed in a directory ``site-packages``."""
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        found = component(PackageURL("pypi", name=distribution.name, version=distribution.version))
        for licence in distribution.metadata.get_all("License-Expression") or ():
            found.licenses.add(LicenseExpression(licence))
        yield found


def locked_packages(lock: Path) -> Iterator[Component]:
    """Yield the Python packages of a lock file, without those for other systems than this one."""
    for line in re.findall(r"^[\w.-]+==[^\\\n]+", lock.read_text(encoding="utf-8"), re.MULTILINE):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            (version,) = requirement.specifier
            yield component(PackageURL("pypi", name=requirement.name, version=version.version))
