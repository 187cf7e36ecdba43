"""Several replicas of one pipeline: an HTTP server over them, and lists of prompts. See README.md in this folder.

`pictures` and `api` are what is asked, `replica` what draws it, `dispatch` who draws what, `on_ray` the processes;
`server` and `prompts` put them together. None of them imports Ray or a web server before it is needed.
"""
