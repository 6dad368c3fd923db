from regard.inspection.measures.gradients import Gradients as Gradients
from regard.inspection.measures.norms import Norms as Norms
from regard.inspection.measures.products import WeightProduct as WeightProduct
