def prepare(inputs, dataset):
    return inputs


def augment(inputs, key, step):
    return inputs
