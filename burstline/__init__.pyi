from burstline.api import Bound as Bound
from burstline.api import Compared as Compared
from burstline.api import Figure as Figure
from burstline.api import LoadedRun as LoadedRun
from burstline.api import bound as bound
from burstline.api import compare as compare
from burstline.api import gate as gate
from burstline.api import limit as limit
from burstline.api import load as load
from burstline.api import run as run
from burstline.bench.progress import Snapshot as Snapshot
from burstline.errors import RooflineError as RooflineError
from burstline.reports.page.limit_page import LimitResult as LimitResult
from burstline.servers.engine import Engine as Engine
from burstline.servers.messages import EngineError as EngineError
from burstline.suites.gate import GateResult as GateResult
from burstline.workloads.request import WorkloadError as WorkloadError

__version__: str
