"""``kvrelay evaluate``: should prefill and decode be apart, for this model, this load and these machines?

    options     what is evaluated, and its digest                                        options.py
    journal     every measured or simulated case, once; a later run goes on from it      journal.py
    plan        what fits into the time, by what the calibration has found               calibration.py, plan.py
    bench       servers of this machine under the load, case by case in rounds           load.py, workbench.py
    sections    from cases to tables, plots and a sentence                               sections/
    report      the answer first, as a page and as JSON                                  report.py, page.py

A section measures what fits on this machine, or simulates with the costs that were measured here. A sentence names a
difference only if it is larger than the rounds' own (``effects.py``).
"""
