"""What semel costs, beside floors and alternatives measured in the same run.

    python -m benchmarks                        everything: results.md and chart.svg in this folder
    python -m benchmarks --only storms,growth   some groups, printed
    python -m benchmarks --smoke                everything once, with tiny counts

measuring    the operation, who makes it run once, a lap of calls
racing       rounds in turn
figures      what was measured, as data: medians, ratios of the same round
report       results.md          chart   chart.svg          backends   private servers
contenders/  who is measured: semel, the floors under it, the alternatives beside it
the rest     one module for each group of scenarios
"""
