"""Analysis of a converted model: multiply-adds per layer and GEMM."""

from fst.lab.analysis.macs import GemmMacs, LayerMacs, MacReport, Total, count_macs

__all__ = ["GemmMacs", "LayerMacs", "MacReport", "Total", "count_macs"]
