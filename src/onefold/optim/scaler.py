class LossScaler:
    def __init__(self, settings): self.scale = 2.0**settings.initial_scale_power if settings and not settings.loss_scale else (settings.loss_scale if settings else 1.0); self.is_active = settings is not None
    def update(self, found): 
        if found and self.is_active: self.scale /= 2
