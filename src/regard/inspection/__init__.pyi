from regard.inspection.measures.gradients import Gradients as Gradients
from regard.inspection.measures.head_statistics import HeadStatistics as HeadStatistics
from regard.inspection.measures.head_statistics import head_statistics as head_statistics
from regard.inspection.measures.key_scores import key_scores as key_scores
from regard.inspection.measures.lazy_products import WeightProduct as WeightProduct
from regard.inspection.measures.norms import Norms as Norms
from regard.inspection.measures.value_zeroing import value_zeroing as value_zeroing
