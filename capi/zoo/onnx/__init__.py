"""An encoder as one ONNX file, checked against PyTorch: `write_onnx` in writing.py, `check_onnx` in checking.py."""
