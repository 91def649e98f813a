"""Variables of device plugins, which anybody may write."""

from __future__ import annotations

from nri_numa.devices.lookup import named_by


def test_what_is_no_address_is_said_and_gives_nothing() -> None:
    found = named_by({"PCIDEVICE_X": "../../etc, ,0000:3b:02.9," + "x" * 200})
    assert not found.addresses
    assert len(found.notes) == 3
    assert all(len(note) < 200 and "no PCI address" in note for note in found.notes)


def test_uuids_and_indices_are_read_and_words_of_images_are_not() -> None:
    def of(value: str) -> tuple[str, ...]:
        return named_by({"NVIDIA_VISIBLE_DEVICES": value}).gpus

    assert of("GPU-1,0, 1:2") == ("GPU-1", "0", "1:2")
    assert of("void") == of("none") == of("") == of("all") == of("ALL") == ()
    assert "images set it" in named_by({"NVIDIA_VISIBLE_DEVICES": "all"}).notes[0]


def test_a_source_that_is_off_is_not_read() -> None:
    variables = {"PCIDEVICE_X": "0000:3b:02.1", "NVIDIA_VISIBLE_DEVICES": "0"}
    assert named_by(variables, pci=False).addresses == ()
    assert named_by(variables, nvidia=False).gpus == ()
    assert named_by({"PATH": "/bin"}) == ((), (), ())
