"""The promises, tried: what is run long by hand (`./dev model`, `./dev chaos`, …) and short with every change."""
