"""The AppArmor profile, as far as that can be said on a kernel without AppArmor."""

import subprocess
from pathlib import Path

from tests.beds.debs import APPARMOR, DebCache
from tests.beds.plugin_process import REPOSITORY
from tests.beds.testbed import TestbedUnavailable, skip_or_fail


def test_the_profile_compiles(tmp_path: Path) -> None:
    """With Debian's parser, for the features that the profile names itself."""
    try:
        (package,) = DebCache().fetch(APPARMOR)
    except TestbedUnavailable as error:
        skip_or_fail(error, "E2E")
    rules = package.root / "etc/apparmor.d"
    features = ("--policy-features", str(rules / "abi/3.0"), "--kernel-features")
    (tmp_path / "parser.conf").touch()
    compiled = tmp_path / "compiled"
    done = subprocess.run(
        [
            *(package.root / "sbin/apparmor_parser", "--skip-kernel-load", "--skip-cache"),
            *("--config-file", tmp_path / "parser.conf", "--ofile", compiled),
            *("--base", rules, "--Include", rules, *features, rules / "abi/3.0"),
            REPOSITORY / "config/security/nri-numa.apparmor",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert b"nri-numa" in compiled.read_bytes()
