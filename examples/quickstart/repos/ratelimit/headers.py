"""The answer to a caller who came too often."""

import math


def too_many_requests(bucket):
    """Status and headers; Retry-After is in whole seconds, rounded up."""
    return 429, {"Retry-After": str(math.ceil(bucket.retry_after()))}
