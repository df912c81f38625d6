"""What every room may use: files that appear whole, checked readers of JSON and YAML."""
