"""Plans and runs as one HTML file that needs no network: the answer, why, timelines, memory, links, and curves of a run.

The page is a report (:mod:`zosim.report`) with charts between its tables. Without JavaScript the charts are SVG pictures, and every chart has its
numbers in a table. A Content-Security-Policy names the hash of each script and style and forbids everything else
(`docs/decisions/0045-one-file-to-open.md`).
"""
