"""The generated protocol code is what proto/*.proto says."""

import importlib.util
import re
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from nri_numa.nri.wire.pb import nri_pb2 as pb

ROOT = Path(__file__).resolve().parents[4]


def load_generator() -> ModuleType:
    """Import proto/generate.py, which is a script and no package member."""
    spec = importlib.util.spec_from_file_location("proto_generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_code_is_fresh() -> None:
    """Somebody who edits a .proto and forgets the generator is told here."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools writes the generated code")
    generator = load_generator()
    compiled = re.compile(rb"Protobuf Python Version: (\S+)")
    names = generator.stale()
    if names:
        # Another compiler release writes another header; that alone is no staleness.
        with tempfile.TemporaryDirectory() as scratch:
            generator.generate(Path(scratch))
            theirs = compiled.search((Path(scratch) / "nri_pb2.py").read_bytes())
            ours = compiled.search((generator.TARGET / "nri_pb2.py").read_bytes())
        if theirs is not None and ours is not None and theirs[1] != ours[1]:
            pytest.skip(f"the installed compiler is {theirs[1]!r}, the files are by {ours[1]!r}")
    assert names == []


def test_the_descriptor_has_every_message_and_no_none() -> None:
    """NRI 0.12.2 has 85 messages; the member None of Field is renamed, Python could not say it."""
    assert len(pb.DESCRIPTOR.message_types_by_name) == 85
    assert pb.Field.Name(0) == "NoField"
    assert pb.DESCRIPTOR.package == "nri.pkg.api.v1alpha1"
    assert set(pb.DESCRIPTOR.services_by_name) == {"Plugin", "Runtime"}
