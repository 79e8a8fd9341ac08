"""The CUDA kernels compile for every card that the documentation names, without a card."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from sglang.srt.lk import driver  # noqa: E402

SOURCE = Path(driver.__file__).with_name("handover.cu")


@pytest.fixture(autouse=True)
def _needs_nvrtc():
    try:
        driver.nvrtc()
    except driver.DriverError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("card", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_compile(card):
    code = driver.compile(SOURCE.read_text(), name=SOURCE.name, architecture=card)
    assert code.startswith(b"\x7fELF") and all(name in code for name in (b"exchange", b"publish", b"collect"))


def test_a_mistake_comes_with_file_line_and_the_compilers_words():
    with pytest.raises(driver.DriverError) as error:
        driver.compile("extern \"C\" __global__ void f() { return 1; }", name="wrong.cu", architecture="sm_90")
    assert "wrong.cu does not compile for sm_90: wrong.cu(1): error" in str(error.value)
