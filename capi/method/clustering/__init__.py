"""Online clustering: `plain` has the formulas, `walk` applies them slice by slice, `online` is the target."""

from capi.method.clustering.online import OnlineClustering as OnlineClustering
