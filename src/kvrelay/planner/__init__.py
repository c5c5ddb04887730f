"""The planner: how many workers, in which roles, and when to change that.

    fleet, demand, objectives, state ──plan──> actions, state          pure: the simulator, suggest mode and act mode
                                                  │                    call the same function
                                                  └──> Actuator        carries an action out

``base`` has the values and the contract of actuators, ``plan`` the decision, ``capacity`` the queueing model below it.
"""

from kvrelay.planner.base import Action as Action
from kvrelay.planner.base import Actuator as Actuator
from kvrelay.planner.base import Demand as Demand
from kvrelay.planner.base import FleetView as FleetView
from kvrelay.planner.base import Hold as Hold
from kvrelay.planner.base import Measured as Measured
from kvrelay.planner.base import Narrow as Narrow
from kvrelay.planner.base import Numbers as Numbers
from kvrelay.planner.base import Objectives as Objectives
from kvrelay.planner.base import Plan as Plan
from kvrelay.planner.base import PlannerState as PlannerState
from kvrelay.planner.base import Room as Room
from kvrelay.planner.base import Start as Start
from kvrelay.planner.base import Stop as Stop
from kvrelay.planner.base import Widen as Widen
from kvrelay.planner.base import WorkerView as WorkerView
from kvrelay.planner.base import words_of as words_of
from kvrelay.planner.demand import Traffic as Traffic
from kvrelay.planner.demand import generated_since as generated_since
from kvrelay.planner.plan import not_begun as not_begun
from kvrelay.planner.plan import plan as plan
from kvrelay.planner.plan import released as released
