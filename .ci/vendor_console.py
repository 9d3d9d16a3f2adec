"""Write the console's libraries from npm: `python .ci/vendor_console.py`.

Each file is one of a package's own, with bare imports rewritten to files beside it and without the link to its source
map. `vendor.json` records versions, npm's checksums of the packages and SHA-256 of the files as they are served.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import tarfile
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "app/deployments/ingress/console/vendor"
REGISTRY = "https://registry.npmjs.org"
#: (package, version, file in the package, name here).
FILES = (
    ("preact", "10.29.8", "dist/preact.module.js", "preact.js"),
    ("preact", "10.29.8", "hooks/dist/hooks.module.js", "hooks.js"),
    ("@preact/signals-core", "1.14.5", "dist/signals-core.mjs", "signals-core.js"),
    ("@preact/signals", "2.11.4", "dist/signals.mjs", "signals.js"),
    ("htm", "3.1.1", "dist/htm.module.js", "htm.js"),
    ("uplot", "1.6.32", "dist/uPlot.esm.js", "uplot.js"),
    ("uplot", "1.6.32", "dist/uPlot.min.css", "uplot.css"),
)
IMPORTS = {
    "preact/hooks": "./hooks.js",
    "preact": "./preact.js",
    "@preact/signals-core": "./signals-core.js",
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    packages: dict[str, tarfile.TarFile] = {}
    record: dict[str, dict[str, str]] = {}
    licences = []
    for package, version, path, name in FILES:
        if package not in packages:
            packages[package], integrity = _download(package, version)
            licence = _read(packages[package], "LICENSE").strip()
            licences.append(f"{package} {version}\n{'-' * len(f'{package} {version}')}\n\n{licence}\n")
        text = _read(packages[package], path)
        text = re.sub(r"\n?(//|/\*)# sourceMappingURL=\S+( \*/)?\s*$", "\n", text)
        for bare, local in IMPORTS.items():
            text = text.replace(f'from"{bare}"', f'from"{local}"')
        content = text.encode()
        (FOLDER / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        record[name] = {"package": package, "version": version, "file": path, "integrity": integrity, "sha256": sha256}
    (FOLDER / "LICENSES.txt").write_text("\n\n".join(licences))
    (FOLDER / "vendor.json").write_text(json.dumps(record, indent=2) + "\n")


def _download(package: str, version: str) -> tuple[tarfile.TarFile, str]:
    """The package and its checksum. Raises ValueError if npm's checksum does not match."""
    with urllib.request.urlopen(f"{REGISTRY}/{package}/{version}") as answer:
        dist = json.load(answer)["dist"]
    with urllib.request.urlopen(dist["tarball"]) as answer:
        content = answer.read()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if integrity != dist["integrity"]:
        raise ValueError(f"{package} {version} has the checksum {integrity}, and npm says {dist['integrity']}")
    return tarfile.open(fileobj=io.BytesIO(content)), integrity


def _read(package: tarfile.TarFile, path: str) -> str:
    file = package.extractfile(f"package/{path}")
    assert file is not None, "a file, not a folder"
    return file.read().decode()


if __name__ == "__main__":
    main()
