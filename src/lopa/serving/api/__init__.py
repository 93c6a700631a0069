"""The API process: HTTP in, jobs to an engine process. It never imports torch."""
