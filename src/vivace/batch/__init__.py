"""Many texts, as fast as the device allows, each into a file of its own; what was done is not done again.

    async with await AsyncEngine.open("mini") as engine:
        with ResultsFolder("out") as results:
            summary = await Batch(read_jobs("jobs.jsonl"), results).run(engine)

``jobs``     ``BatchJob``, and the lines of a jobs file as such
``results``  ``ResultsFolder``: audio files that are whole or not there, and one line of result per job
``run``      ``Batch``: keeps as many requests in flight as the engine serves at once
"""

from vivace.batch.jobs import BadJob, BatchJob, read_jobs
from vivace.batch.results import JobResult, ResultsFolder
from vivace.batch.run import Batch, BatchSummary

__all__ = ["BadJob", "Batch", "BatchJob", "BatchSummary", "JobResult", "ResultsFolder", "read_jobs"]
