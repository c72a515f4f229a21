"""kcap's own C++ where it cannot be compiled: that is said, and whoever asked for it goes on without."""

from __future__ import annotations

import pytest

from kcap.system import native_build


@pytest.mark.parametrize("script", ["exec sleep 60", '[ "$1" = --version ] || exec sleep 60'])
def test_a_compiler_that_does_not_end_is_none(tmp_path, monkeypatch, script):
    compiler, source = tmp_path / "hangs", tmp_path / "source.cpp"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    source.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "LIMIT_S", 0.2)
    with pytest.raises(native_build.Unavailable, match=r"hangs does not end within 0\.2 s"):
        native_build.build([source])
