from __future__ import annotations

import subprocess
import sys


def test_import_brings_no_decoder_of_videos_and_no_tensor_framework() -> None:
    """Importing the package imports neither PyAV nor a tensor framework."""
    program = (
        "import sys, vlbatch.media;"
        "print(sorted({'av', 'torch', 'paddle', 'transformers', 'cv2'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert result.stdout.decode().strip() == "[]"
