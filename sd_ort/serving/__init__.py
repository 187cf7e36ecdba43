"""Replicas of one pipeline: an HTTP server over them, and image generation from prompt lists. See README.md here.

`image_jobs` and `api` define requests, `replica` generates images, `dispatch` distributes jobs to replicas,
`ray_replicas` starts replica processes; `server` and `prompt_lists` combine these. No module imports Ray or a web
server before it needs one.
"""
