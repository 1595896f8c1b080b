import torch
from safetensors.torch import save_file
from task import Net, accuracy, train
from torch.nn import functional as F
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = DataLoader(train, batch_size=192, shuffle=True)

for epoch in range(20):
    for inputs, classes in loader:
        loss = F.cross_entropy(model(inputs.to(device)), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(f"accuracy {accuracy(model, device):.2f}")
save_file(model.state_dict(), "model.safetensors")
