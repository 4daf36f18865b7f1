"""The machine and its measured ceilings: what the other figures are shares of."""

from bench import environment
from bench.findings import finding, number
from bench.timing import copy_bandwidth, matrix_product


def conclusions(d: dict) -> dict:
    copied, product = number(d["copy_bytes_per_second"]["p50"] / 1e9), d["flop_per_second"]
    products = f"matrix products {number(product['best'] / 1e12)} TFLOP/s in {product['dtype']}"
    return {"findings": [finding("ceilings", f"copies {copied} GB/s, read and written", products)]}


def main(arguments: list[str]) -> int:
    options = environment.parser("machine", "Card, versions, measured ceilings.").parse_args(arguments)
    device, seconds = environment.device(), 0.1 if options.smoke else 1
    result = {
        "copy_bytes_per_second": copy_bandwidth(device, seconds),
        "flop_per_second": matrix_product(device, seconds),
    }
    environment.save(options, result | conclusions(result))
    for name, value in environment.describe().items():
        print(f"{name:16} {value}")
    copy, product = result["copy_bytes_per_second"], result["flop_per_second"]
    print(
        f"copy             {copy['p50'] / 1e9:,.1f} GB/s read and written (p20 to p80 of the time: "
        f"{copy['p80'] / 1e9:,.1f} to {copy['p20'] / 1e9:,.1f})"
    )
    for side, rate in product["sizes"].items():
        print(f"matrix product   {rate / 1e12:,.2f} TFLOP/s, {product['dtype']}, {side} x {side}")
    return 0
