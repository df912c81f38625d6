"""Models in and out: run folders, checkpoint files, published weights, the Hub, transformers, ONNX, baselines."""
